"""The test kit, for users as well: what finds a wrong allocator, planner or kernel."""
