-- release(worker, held × (id, fence)) -> how many requests went to `resume`
--
-- A worker that leaves hands back what it holds and is forgotten.
pass_maxmemory()
local worker = ARGV[1]
local FIRST, WIDTH = 2, 2

local released = 0

local function release_one(id, fence)
  local request = read(id, 'state', 'fence', 'worker')
  if request.state ~= 'running' or request.fence ~= fence then return 0 end
  give_back(id, request)
  count('released')
  released = released + 1
  return 1
end

each(FIRST, WIDTH, (#ARGV - FIRST + 1) / WIDTH, release_one)
redis.call('ZREM', WORKERS, worker)
redis.call('DEL', worker_key(worker))
return released
