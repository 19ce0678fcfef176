"""Views over ranges of a knot, and what of them may stay in memory."""
