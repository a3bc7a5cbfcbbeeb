"""The Python backend model of a repository: a thin stub inside Triton, and the engine in a child process of it."""
