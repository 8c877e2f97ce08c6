"""`hpcrl submit`: batch jobs from a job template and a site file."""
