"""`hpcrl report`: what the folders of runs hold, as one HTML page. Neither torch nor MPI."""
