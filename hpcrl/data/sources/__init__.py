"""The datasets of `hpcrl data`, one file each: its docstring is the help, and SOURCE is the dataset."""
