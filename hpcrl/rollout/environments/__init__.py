"""What answers the model between its turns: tools, simulated users, the loop over turns. A new environment is a file
here."""
