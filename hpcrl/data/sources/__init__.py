"""Datasets of `hpcrl data`: each file declares some, by name in `SOURCES`. Rows of verl's schema only; no files are
read or written here."""
