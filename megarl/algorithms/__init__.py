"""The papers' mathematics as pure functions on packed torch tensors.

Only torch is imported here. Quantities to be reduced over ranks are returned as sums."""
