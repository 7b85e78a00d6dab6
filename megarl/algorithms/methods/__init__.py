"""The methods beyond PPO's loss, one file each. `megarl.config.methods` lists them.

A file has the formulas alone, on packed tensors. What a method does with ranks is in megarl/training/methods.
"""
