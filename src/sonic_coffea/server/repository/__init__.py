"""repository: model repositories as Triton reads them, built from files and functions."""
