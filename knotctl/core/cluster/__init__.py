"""The coverage-first cluster: planner, directives and simulator as pure state machines, and the ledger."""
