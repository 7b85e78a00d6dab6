"""The papers' mathematics as pure functions on packed tensors. Callers reduce sums over ranks."""
