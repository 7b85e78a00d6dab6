"""The papers' mathematics as pure functions on packed torch tensors: weights of the loss terms, advantages,
losses, evaluation scores. Nothing but torch is imported here; whatever must be summed over ranks is returned
as a sum."""
