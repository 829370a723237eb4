"""All code that depends on a platform, a mesh or other processes."""
