"""Formulas of methods beyond PPO, listed in `megarl.config.methods`.

Their work across ranks is in megarl/training/methods."""
