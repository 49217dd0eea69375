"""Discrete-event simulation of workloads through the allocator and the planners, with a clock from a latency model."""
