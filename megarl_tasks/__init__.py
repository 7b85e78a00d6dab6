"""Problems to train on: seeded tasks of demos and ablations, and reasoning-gym's."""
