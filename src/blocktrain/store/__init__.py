"""Ledger and blobs behind one contract."""
