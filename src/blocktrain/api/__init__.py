"""What scripts and notebooks call: the same objects as the commands. `blocktrain` exports it."""
