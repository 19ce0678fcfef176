"""The coverage-first planner and its ledger: pure state machines."""
