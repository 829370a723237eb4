"""All that knows a platform, a mesh or another process."""
