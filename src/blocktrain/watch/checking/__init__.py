"""Processes beside the coordinator that check updates: judged on secret text, trained again."""
