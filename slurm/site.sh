# shellcheck shell=bash disable=SC2034
# What a site sets, for all job scripts here.  Bash reads one such file on the first node of a job: the one that
# PDGEMM_SITE names (sbatch --export=ALL,PDGEMM_SITE=/path/to/this-machine.sh ...); else ~/.config/pdgemm/site.sh; else
# the one beside the scripts.  Copy it to ~/.config/pdgemm and edit the copy: no update of pdgemm touches that one.
# Without what is needed a job ends at once, with exit code 2 and a line that names the setting.
#
# Partition, account, quality of service: on sbatch's command line (-p, -A, -q), or once for your shell, as
# SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_QOS.  Both win over the #SBATCH lines of the scripts.

# ---------------------------------------------------------------- programs
# Modules, in the order in which they are loaded: compiler, the MPI that mpi4py uses, CUDA.  All others are unloaded
# first, for sbatch hands on those that happen to be loaded in your shell.  Empty: modules are left alone.
PDGEMM_MODULES=''

# Needed.  The environment with pdgemm in it (venv or conda): the folder with bin/python.  All nodes must see it.
# For thousands of ranks put it on a file system that many can read at once; home folders seldom are.
PDGEMM_VENV=''

# ---------------------------------------------------------------- ranks
# Needed.  How ranks are started; {ranks} becomes their number.  Words are separated by blanks, without quotes.
# Launcher and MPI have to speak the same protocol, or N processes start that each believe to be alone: a job looks for
# that before it begins.  `srun --mpi=list` tells what this Slurm speaks.
#
#   srun --mpi=pmix -n {ranks}           Open MPI built with PMIx; pmix_v4 and the like where there are several
#   srun --mpi=pmi2 -n {ranks}           MPICH, MVAPICH; Intel MPI with I_MPI_PMI_LIBRARY=/path/to/libpmi2.so
#   srun --mpi=cray_shasta -n {ranks}    Cray's MPICH
#   mpirun -n {ranks}                    an MPI with a launcher of its own: the wheels of PyPI, Intel MPI.  Open MPI's
#                                        binds each rank to one core; for 8 threads: mpirun --map-by slot:PE=8 ...
#   mpiexec -n {ranks}                   PBS: Cray's PALS, Intel MPI, MPICH.  An MPI that was built without PBS or LSF
#                                        does not know the nodes: mpirun --hostfile $PBS_NODEFILE -n {ranks}, or
#                                        $LSB_DJOB_HOSTFILE (in double quotes here)
#   jsrun -n {ranks} -a 1 -c 4           LSF with IBM Spectrum MPI; -c is the number of cores of a rank
PDGEMM_LAUNCH=''

# The same for gpus.sbatch, if it differs.  Every rank should see all GPUs of its node: pdgemm takes one by the rank's
# number on the node, and CUDA IPC reads the others' memory, which works only between GPUs that the rank can see.  So
# neither --gpus-per-task=1 nor --gpu-bind=single:1 here, unless the site demands it (panels then travel by NCCL or
# MPI).  Where Slurm binds GPUs by itself: srun --mpi=pmix --gpu-bind=none -n {ranks}
PDGEMM_GPU_LAUNCH=''

# Threads of BLAS per rank: what sbatch was told.  Empty: the rank's share of the cores that it may run on.
PDGEMM_THREADS=${SLURM_CPUS_PER_TASK-}

# ---------------------------------------------------------------- network
# Open MPI through UCX, on InfiniBand.
#export OMPI_MCA_pml=ucx
# Open MPI over TCP (Ethernet): a message then begins when it is posted, and is known to have arrived when it has, not
# after those that follow it.
#export OMPI_MCA_btl_tcp_flags=send,inplace OMPI_MCA_pml_ob1_send_pipeline_depth=1000
#export OMPI_MCA_btl_tcp_eager_limit=8388608 OMPI_MCA_btl_tcp_rndv_eager_limit=8388608
#export OMPI_MCA_btl_tcp_max_send_size=8388608
# Which port, where a node has several: one may serve storage only.  `ucx_info -d` lists them.
#export UCX_NET_DEVICES=mlx5_0:1
# Only if UCX chooses badly, for what is not in the list is off.  Without cuda_copy and cuda_ipc a pointer to a GPU is
# taken for one to the host.
#export UCX_TLS=rc,sm,self,cuda_copy,cuda_ipc

# ---------------------------------------------------------------- GPUs
# MPI that takes pointers to GPUs.  Cray's has to be told; pdgemm asks and tries, and can be told: yes or no.
#export MPICH_GPU_SUPPORT_ENABLED=1
#export PDGEMM_GPU_AWARE=no
# NCCL finds its ranks by TCP: on the interface that leads to the other nodes, not to the management network.
#export NCCL_SOCKET_IFNAME=ib0
#export NCCL_IB_HCA=mlx5
#export NCCL_DEBUG=WARN

# ---------------------------------------------------------------- files
# Lustre: over how many storage targets new files in the folder of C are laid (-1: all).  One target writes at some
# GB/s, however many ranks there are.  It is set for the folder, for C is written under another name and then renamed.
PDGEMM_STRIPES=''
# File systems without locks (Lustre mounted without flock): HDF5 fails to open files there, unless
#export HDF5_USE_FILE_LOCKING=FALSE
