"""HTTP only: each service is a core object behind endpoints."""
