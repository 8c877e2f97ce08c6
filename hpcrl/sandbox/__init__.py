"""What is not trusted: processes for code of models and users, files and text of others, and new files where other
users may write. Standard library only, because children import it."""
