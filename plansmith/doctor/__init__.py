"""What this machine can compile, load and serve, and what it lacks."""
