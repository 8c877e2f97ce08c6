"""What layers are made of: attention, mixtures of experts, norms and linear layers, rotary embedding. A new block is a
file here. No names of Hugging Face's files (`hpcrl.model.families`), no whole model."""
