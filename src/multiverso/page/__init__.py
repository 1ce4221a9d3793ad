"""A page in the browser for a job: live, of a file afterwards, and as one file to send to somebody."""
