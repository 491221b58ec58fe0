"""A whole run on a simulated clock, network and disk. Deterministic, and without torch.

Real are the coordinator with its rounds, merges and stores, the blobs' files step by step, the
worker's session with its retries, heartbeats and uploads, every message, and the audit. Simulated
are time, the network, the disk below the blobs, and training. docs/simulation.md says what that
can find, and what it cannot.
"""
