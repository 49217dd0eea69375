"""Control plane: what runs next. Python and numpy, no torch; planners need no device and no clock."""
