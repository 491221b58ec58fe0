"""What a run may keep on the disk, and what it keeps there."""
