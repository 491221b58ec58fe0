"""Every parser at a boundary, fed with what nobody meant to send. docs/fuzzing.md explains it."""
