-- A job-submit plug-in for Slurm (JobSubmitPlugins=lua in slurm.conf): jobs that say what they train are queued only
-- where that fits. A batch script says it in lines of its own, in the words of memplan.estimate:
--
--   #MEMPLAN model: llama-3.1-8b
--   #MEMPLAN gpus: 8
--   #MEMPLAN engine: fsdp
--
-- A pool's `queue` is the partition. slurmctld waits for this: it is cut off after some seconds, and the job then passes.

local MEMPLAN = os.getenv("MEMPLAN_COMMAND") or "timeout 5 memplan"
local POOLS = os.getenv("MEMPLAN_POOLS") or "/etc/slurm/pools.yaml"
local ADMITTED, REFUSED, UNREADABLE = 0, 5, 3

local function quoted(text)
  return "'" .. text:gsub("'", "'\\''") .. "'"
end

local function request_of(script)
  local lines = {}
  for line in (script or ""):gmatch("[^\r\n]+") do
    local said = line:match("^#MEMPLAN%s+(.*)$")
    if said then
      lines[#lines + 1] = said
    end
  end
  return #lines > 0 and table.concat(lines, "\n") .. "\n" or nil
end

-- The exit code and what was said on stderr. Lua 5.1 does not hand on the code of a pipe: the shell prints it.
local function asked(request, partition)
  local pool = partition and partition ~= "" and " --pool " .. quoted(partition) or ""
  local command = "printf %s " .. quoted(request) .. " | " .. MEMPLAN .. " admit - --pools " .. quoted(POOLS)
    .. pool .. " --format json 2>&1 >/dev/null; echo \"code $?\""
  local pipe = io.popen(command)
  local printed = pipe:read("*a")
  pipe:close()
  local said, code = printed:match("^(.-)code (%d+)%s*$")
  return tonumber(code), (said or ""):gsub("^memplan: error: ", ""):gsub("%s+$", "")
end

function slurm_job_submit(job_desc, part_list, submit_uid)
  local request = request_of(job_desc.script)
  if not request then
    return slurm.SUCCESS
  end
  local code, said = asked(request, job_desc.partition)
  if code == REFUSED or code == UNREADABLE then
    slurm.log_user("memplan: " .. said)
    return slurm.ERROR
  end
  if code ~= ADMITTED then
    slurm.log_info("memplan: not judged: %s", said)
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
