# The planning service, without torch: about 260 MB on top of Python, instead of gigabytes.
#
#   docker build -t autoac .
#   docker run -p 8421:8421 -v autoac:/data -e AUTOAC_TOKEN="$(openssl rand -hex 16)" autoac
#
# A container listens on all of its addresses, so it starts only with AUTOAC_TOKEN or a database that has keys.
# The database is a file in /data, or AUTOAC_DATABASE_URL. The same image is a worker:
# `docker run ... autoac python -m autoac.api worker`. The health check asks `/livez` of both. For builds that
# never change, name the base image by its digest.
# tests/api/deploy/test_image.py follows the COPY, RUN, ENV, HEALTHCHECK and CMD lines outside of Docker:
# keep RUN lines that install in the form `pip ...` or `python ...`.
FROM python:3.11-slim

WORKDIR /src
# Requirements come before the sources, so that a change of the sources reinstalls nothing.
COPY constraints.txt ./
COPY pyproject.toml ./
# The same distribution without torch and the packages that need it: the lines that name them go. The first
# requirement of `postgres` is `service`.
RUN python -c "import re; from pathlib import Path; f = Path('pyproject.toml'); f.write_text(re.sub(r'(?m)^.*(\btorch\b|autoac.(profiler|tape)|ac_client|^dynamic).*\n', '', f.read_text()))"
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; extras = p['optional-dependencies']; print(*p['dependencies'], *extras['service'], *extras['postgres'][1:], sep='\n', file=open('requirements.txt', 'w'))"
RUN pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY LICENSE ./
COPY planner planner
COPY api api
RUN pip install --no-cache-dir --no-deps .
RUN pip check
# The same user id as in deploy/kubernetes.yaml, so that both can read a volume.
RUN useradd --system --no-create-home --uid 10001 autoac

RUN mkdir -m 700 /data && chown autoac /data

WORKDIR /
USER 10001
ENV AUTOAC_HOST=0.0.0.0 AUTOAC_PORT=8421 AUTOAC_WORKER_PORT=9421 XDG_DATA_HOME=/data
VOLUME /data
EXPOSE 8421
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["python", "-m", "autoac.api.cli.health_check"]
CMD ["python", "-m", "autoac.api"]
