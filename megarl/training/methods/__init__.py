"""Distributed parts of methods, whose formulas are in megarl/algorithms/methods."""
