"""What is not trusted: processes for code of models and users, files and text of others, and files beside other users'.
Standard library only, because children import it."""
