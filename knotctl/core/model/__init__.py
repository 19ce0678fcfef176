"""The forward pass by phase, and who does which part of it."""
