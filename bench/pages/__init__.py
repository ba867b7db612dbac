"""README, docs and pictures from stored records; nothing here measures."""
