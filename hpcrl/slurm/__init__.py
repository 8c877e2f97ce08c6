"""`hpcrl submit`: from a job template and a site file to a batch job."""
