"""What can be known without training: neither DeepSpeed nor a GPU is needed here."""
