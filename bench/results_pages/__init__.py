"""Parts of bench/results_page.py: what each stored document says, as claims."""
