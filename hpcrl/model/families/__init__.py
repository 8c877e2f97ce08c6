"""Families of Hugging Face models: config.json and the names of tensors, a file per family or for those with the same
names. No torch; files of tensors are read in `hpcrl.model.hf_files`."""
