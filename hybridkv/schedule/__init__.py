<<<<<<< HEAD
"""Control plane: what runs next. Python and numpy, no torch; planners need no device and no clock."""
=======
"""What runs next: step planners as pure state machines, their latency models and bounds. No torch."""
>>>>>>> 607a475 (Chrome trace writer: both simulators draw their timelines with it)
