"""What methods do with a step's batch on all ranks, one file each.

The formulas are in megarl/algorithms/methods.
"""
