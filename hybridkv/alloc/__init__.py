"""Control plane: who holds which page. Python and numpy, no torch.

organization, capacity   where states live, and what that costs
pages, slots, storage    pools, and states taken from them
checkpoint, prefix       attention blocks and composite checkpoints, and how they are found
requests, rows, growth   what a request holds, and how it comes by it
planes                   planes of looped models, and pages that they share
cache, branch, audit     what an engine drives
"""
