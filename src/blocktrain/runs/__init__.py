"""The run folder: version 0, a model out of a run, `train` on one machine, the report."""
