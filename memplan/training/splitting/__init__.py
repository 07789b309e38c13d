"""How a job is split over ranks, as data: degrees, stages, schedules."""
