"""What the core serves besides plain models, a folder each. Nothing of the core imports one."""
