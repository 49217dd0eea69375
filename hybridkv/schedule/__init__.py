"""What runs next: step planners as pure state machines, their latency models and bounds. No torch, no device, no clock."""
