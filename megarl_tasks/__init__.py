"""Problems to train on: seeded tasks of demos and ablations with teachers, and reasoning-gym's."""
