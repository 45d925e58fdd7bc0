-- renew(worker, lease, status, held × (id, fence)) -> {id, fence, why, ...} of what the worker has lost
--
-- Extends the leases that the worker still holds, and is its heartbeat. why: 'fenced' (somebody else has it, or nobody),
-- 'cancelled' or 'deadline' (the worker still has it: it ends it, with what it has generated).
pass_maxmemory()
local worker, lease, status = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local FIRST, WIDTH = 4, 2

local lost = {}

local function renew_one(id, fence)
  local request = read(id, 'state', 'fence', 'cancelled', 'due', 'alone')
  local why = 'fenced'
  if request.state == 'running' and request.fence == fence then
    redis.call('ZADD', LEASES, integer(now + lease), id)
    if request.alone and redis.call('GET', SOLO) == worker then redis.call('PEXPIRE', SOLO, lease) end
    why = called_off(request)
  end
  if why then
    for _, part in ipairs({ id, fence, why }) do lost[#lost + 1] = part end
  end
  return 1
end

redis.call('ZADD', WORKERS, integer(now), worker)
redis.call('SET', worker_key(worker), status, 'PX', FORGET_WORKER_AFTER * lease)
each(FIRST, WIDTH, (#ARGV - FIRST + 1) / WIDTH, renew_one)
return lost
