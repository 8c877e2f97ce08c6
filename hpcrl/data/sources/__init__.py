"""The datasets of `hpcrl data`: each module has SOURCES, which maps a name to the dataset and one line of help."""
