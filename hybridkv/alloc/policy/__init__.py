"""Decisions about lifetimes, as data: which boundaries are kept, how much room admission leaves.

Policies see positions and counts, never pools: they may rank or refuse, never free, and cannot break an invariant.
"""
