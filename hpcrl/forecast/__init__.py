"""What a job will need before it runs: `hpcrl plan`, the dry run, memory and time. No GPU; MPI for the dry run only,
torch only to build models without memory."""
