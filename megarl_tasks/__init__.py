"""Problems to train on: those of `megarl demo` and `megarl ablate` with their teachers, made from a seed, and
those that reasoning-gym generates."""
